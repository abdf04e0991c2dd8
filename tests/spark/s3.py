"""An object store in memory that speaks as much of S3 as pyarrow's client needs."""

from __future__ import annotations

import hashlib
import re
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs, unquote, urlsplit
from xml.sax.saxutils import escape

DATE = "Wed, 18 Nov 2026 10:00:00 GMT"
ISO_DATE = "2026-11-18T10:00:00.000Z"


class ObjectStore:
    """One bucket, `lake`. `objects` are visible; parts of uploads are not, until completed."""

    def __init__(self) -> None:
        self.objects: dict[str, bytes] = {}
        self.parts: dict[str, dict[int, bytes]] = {}
        store = self

        class Handler(_Handler):
            contents = store

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def uri(self, path: str) -> str:
        port = self._server.server_address[1]
        return f"s3://lake/{path}?endpoint_override=127.0.0.1:{port}&scheme=http&region=us-east-1"

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


class _Handler(BaseHTTPRequestHandler):
    contents: ObjectStore
    protocol_version = "HTTP/1.1"

    def log_message(self, format: str, *args: object) -> None:
        pass

    def _parse(self) -> tuple[str, dict[str, str]]:
        parts = urlsplit(self.path)
        query = {k: v[0] for k, v in parse_qs(parts.query, keep_blank_values=True).items()}
        _, _, key = unquote(parts.path).lstrip("/").partition("/")
        return key, query

    def _body(self) -> bytes:
        if "chunked" in self.headers.get("Transfer-Encoding", ""):
            data = b"".join(self._chunks())
        else:
            data = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        if "aws-chunked" not in self.headers.get("Content-Encoding", ""):
            return data
        plain, position = b"", 0
        while True:
            end = data.index(b"\r\n", position)
            size = int(data[position:end].split(b";")[0], 16)
            if not size:
                return plain
            plain += data[end + 2 : end + 2 + size]
            position = end + 2 + size + 2

    def _chunks(self) -> Iterator[bytes]:
        while size := int(self.rfile.readline().split(b";")[0], 16):
            yield self.rfile.read(size)
            self.rfile.readline()
        while self.rfile.readline().strip():
            pass

    def _answer(self, code: int, body: bytes = b"", **headers: str) -> None:
        self.send_response(code)
        self.send_header("Last-Modified", DATE)
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        if "Content_Length" not in headers:
            self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def _missing(self) -> None:
        self._answer(404, b"<Error><Code>NoSuchKey</Code></Error>", Content_Type="application/xml")

    def do_HEAD(self) -> None:
        key, _ = self._parse()
        data = self.contents.objects.get(key)
        if key and data is None:
            return self._missing()
        self._answer(200, Content_Length=str(len(data or b"")), ETag=_etag(data or b""))

    def do_GET(self) -> None:
        key, query = self._parse()
        if not key:
            return self._list(query)
        data = self.contents.objects.get(key)
        if data is None:
            return self._missing()
        match = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", ""))
        if not match:
            return self._answer(200, data, ETag=_etag(data))
        start, end = int(match[1]), min(int(match[2] or len(data)), len(data) - 1)
        span = f"bytes {start}-{end}/{len(data)}"
        self._answer(206, data[start : end + 1], ETag=_etag(data), Content_Range=span)

    def _list(self, query: dict[str, str]) -> None:
        prefix, delimiter = query.get("prefix", ""), query.get("delimiter", "")
        found, groups = [], set()
        for key, data in sorted(self.contents.objects.items()):
            if not key.startswith(prefix):
                continue
            rest = key[len(prefix) :]
            if delimiter and delimiter in rest:
                groups.add(prefix + rest.split(delimiter)[0] + delimiter)
            else:
                found.append((key, data))
        limit = int(query.get("max-keys", 1000))
        text = "".join(
            f"<Contents><Key>{escape(key)}</Key><LastModified>{ISO_DATE}</LastModified>"
            f"<Size>{len(data)}</Size><ETag>{_etag(data)}</ETag></Contents>"
            for key, data in found[:limit]
        )
        text += "".join(
            f"<CommonPrefixes><Prefix>{escape(group)}</Prefix></CommonPrefixes>"
            for group in sorted(groups)
        )
        count = len(found[:limit]) + len(groups)
        self._xml(
            f"<ListBucketResult><Name>lake</Name><Prefix>{escape(prefix)}</Prefix>"
            f"<KeyCount>{count}</KeyCount><IsTruncated>false</IsTruncated>{text}"
            "</ListBucketResult>"
        )

    def _xml(self, text: str) -> None:
        body = f'<?xml version="1.0" encoding="UTF-8"?>{text}'.encode()
        self._answer(200, body, Content_Type="application/xml")

    def do_PUT(self) -> None:
        key, query = self._parse()
        data = self._body()
        if "uploadId" in query:
            parts = self.contents.parts[query["uploadId"]]
            parts[int(query["partNumber"])] = data
        elif source := self.headers.get("x-amz-copy-source"):
            _, _, origin = unquote(source).lstrip("/").partition("/")
            self.contents.objects[key] = self.contents.objects[origin]
            return self._xml(f"<CopyObjectResult><ETag>{_etag(data)}</ETag></CopyObjectResult>")
        else:
            self.contents.objects[key] = data
        self._answer(200, ETag=_etag(data))

    def do_POST(self) -> None:
        key, query = self._parse()
        body = self._body()
        if "uploads" in query:
            upload = f"u{len(self.contents.parts)}"
            self.contents.parts[upload] = {}
            return self._xml(
                "<InitiateMultipartUploadResult><Bucket>lake</Bucket>"
                f"<Key>{escape(key)}</Key><UploadId>{upload}</UploadId>"
                "</InitiateMultipartUploadResult>"
            )
        if "uploadId" in query:
            parts = self.contents.parts.pop(query["uploadId"])
            data = self.contents.objects[key] = b"".join(parts[n] for n in sorted(parts))
            return self._xml(
                f"<CompleteMultipartUploadResult><Key>{escape(key)}</Key>"
                f"<ETag>{_etag(data)}</ETag></CompleteMultipartUploadResult>"
            )
        for name in re.findall(rb"<Key>(.*?)</Key>", body):
            self.contents.objects.pop(unquote(name.decode()), None)
        self._xml("<DeleteResult></DeleteResult>")

    def do_DELETE(self) -> None:
        key, _ = self._parse()
        self.contents.objects.pop(key, None)
        self._answer(204)


def _etag(data: bytes) -> str:
    return '"' + hashlib.md5(data).hexdigest() + '"'

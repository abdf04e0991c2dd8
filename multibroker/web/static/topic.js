// A topic's page: ranges, retention, consumers, a live tail, and a form to publish.

import { call, stream } from "./api.js";
import { attempt, toast } from "./console.js";
import { bytes, el, number, spark, table } from "./dom.js";

const TAIL_MAX = 200;

function hex(message) {
  const raw = message.base64 === undefined
    ? new TextEncoder().encode(message.text)
    : Uint8Array.from(atob(message.base64), (character) => character.charCodeAt(0));
  const pairs = Array.from(raw, (byte) => byte.toString(16).padStart(2, "0"));
  const lines = [];
  for (let at = 0; at < pairs.length; at += 16) lines.push(pairs.slice(at, at + 16).join(" "));
  return lines.join("\n");
}

function show(message, format) {
  if (format === "hex" || message.text === undefined) return hex(message);
  if (format === "json") {
    try { return JSON.stringify(JSON.parse(message.text), null, 2); } catch { return message.text; }
  }
  return message.text;
}

function tail(path, partitions) {
  const list = el("ol", { class: "tail", tabindex: 0, "aria-label": "Live messages, newest first" });
  const format = el("select", {}, ["text", "json", "hex"].map((name) => el("option", {}, name)));
  const partition = el("select", {}, Array.from({ length: partitions }, (_, n) => el("option", {}, String(n))));
  const toggle = el("button", { type: "button", class: "quiet" }, "Pause");
  const shown = [];
  let stop = null;
  let last = null;

  function add(node) {
    list.prepend(node);
    while (list.childElementCount > TAIL_MAX) list.lastElementChild.remove();
  }
  function item(message) {
    const time = new Date(message.timestamp_ms).toISOString().slice(11, 23);
    const details = [`#${message.seq}`, time, bytes(message.size)];
    if (message.key !== undefined) details.push(`key ${message.key}`);
    for (const [name, value] of message.headers || []) details.push(`${name}=${value}`);
    const node = el("li", {}, el("span", { class: "meta" }, details.join(" · ")),
      el("pre", {}, show(message, format.value) + (message.cut ? " …" : "")));
    node.message = message;
    return node;
  }
  function receive(name, data) {
    if (name === "start") { last = data.after; return; }
    if (name === "skipped") return add(el("li", {}, el("span", { class: "note" }, `skipped ${data.first} to ${data.last}`)));
    if (name === "failed") return add(el("li", {}, el("span", { class: "note" }, data.error)));
    if (data.left_out) add(el("li", {}, el("span", { class: "note" }, `${number(data.left_out)} messages not shown`)));
    for (const message of data.messages) { add(item(message)); last = message.seq; }
  }
  function start(after) {
    const query = `partition=${partition.value}${after === null ? "" : `&after=${after}`}`;
    stop = stream(`topics/${path}/tail?${query}`, receive, (error) => {
      stop = null;
      toggle.textContent = "Resume";
      if (error) add(el("li", {}, el("span", { class: "note" }, error.message)));
    });
    toggle.textContent = "Pause";
  }
  function pause() { if (stop) { stop(); stop = null; } toggle.textContent = "Resume"; }

  toggle.addEventListener("click", () => (stop ? pause() : start(last)));
  partition.addEventListener("change", () => { pause(); list.replaceChildren(); start(null); });
  format.addEventListener("change", () => {
    for (const node of list.children) {
      if (node.message) node.querySelector("pre").textContent = show(node.message, format.value) + (node.message.cut ? " …" : "");
    }
  });
  start(null);
  return { pause, node: el("section", { class: "card" }, el("h2", {}, "Live messages"),
    el("div", { class: "row" }, el("label", {}, "Show as", format),
      el("label", {}, "Partition", partition), el("label", {}, toggle)), list), shown };
}

function publishForm(path, partitions) {
  const payload = el("textarea", { name: "payload", required: true });
  const key = el("input", { name: "key", autocomplete: "off" });
  const partition = el("input", { name: "partition", type: "number", min: 0, max: partitions - 1, value: 0 });
  return el("form", { class: "card", onsubmit: async (event) => {
    event.preventDefault();
    await attempt(async () => {
      const document = { payload: payload.value, partition: Number(partition.value) };
      if (key.value) document.key = key.value;
      const { seq } = await call("POST", `topics/${path}/messages`, document);
      toast(`Stored as message ${seq}`);
      payload.value = "";
    });
  } }, el("h2", {}, "Publish"), el("label", {}, "Message", payload),
  el("div", { class: "row" }, el("label", {}, "Key (optional)", key), el("label", {}, "Partition", partition),
    el("label", {}, el("button", { type: "submit" }, "Publish"))));
}

function configForm(path, config) {
  const key = el("select", { name: "setting" }, Object.keys(config).map((name) => el("option", {}, name)));
  const value = el("input", { name: "value", required: true, value: Object.values(config)[0] });
  key.addEventListener("change", () => { value.value = config[key.value]; });
  return el("form", { class: "row", onsubmit: async (event) => {
    event.preventDefault();
    await attempt(async () => {
      const answer = await call("PATCH", `topics/${path}`, { config: { [key.value]: value.value } });
      Object.assign(config, answer.config);
      toast(`${key.value} is now ${answer.config[key.value]}`);
    });
  } }, el("label", {}, "Setting", key), el("label", {}, "Value", value),
  el("label", {}, el("button", { type: "submit", class: "quiet" }, "Change")));
}

function facts(topic) {
  return [
    table("Partitions", [["Partition", "number"], ["First", "number"], ["Last", "number"], ["Size", "number"]],
      topic.partitions.map((part) => [String(part.partition), String(part.first), String(part.last), bytes(part.bytes)])),
    topic.consumers.length ? table("Consumers", [["Name", "name"], ["Position", "number"], ["Lag", "number"], ["In flight", "number"], ["Readers", "number"]],
      topic.consumers.map((row) => [row.name || "(private)", number(row.position), number(row.lag), number(row.in_flight), number(row.readers)]))
      : el("p", { class: "faint" }, "No consumers or groups."),
  ];
}

export function topicPage(main, path, rates) {
  const title = el("h1", {}, decodeURIComponent(path));
  const chart = el("section", { class: "card" });
  const about = el("section", { class: "card" });
  const settings = el("section", { class: "card" });
  let live = null;
  let closed = false;
  main.replaceChildren(el("p", {}, el("a", { href: "#/" }, "← All topics")), title);
  call("GET", `topics/${path}`).then((topic) => {
    if (closed) return;
    title.textContent = topic.name || "(empty name)";
    live = tail(path, topic.partitions.length);
    settings.append(el("h2", {}, "Retention and other settings"),
      table("", [["Setting", "name"], ["Value", ""]], Object.entries(topic.config)), configForm(path, topic.config),
      el("p", {}, el("button", { type: "button", class: "danger", onclick: () => remove(path, topic.name) }, "Delete topic")));
    main.append(el("div", { class: "split" }, chart, publishForm(path, topic.partitions.length)), live.node,
      el("div", { class: "split" }, about, settings));
    about.replaceChildren(...facts(topic));
  }, (error) => main.append(el("p", { class: "problem" }, error.message)));
  let busy = false;
  return {
    close() { closed = true; if (live) live.pause(); },
    async update() {
      chart.replaceChildren(el("h2", {}, "Last minute"),
        el("p", { class: "big" }, `${number(rates.last(path, "in"))} in/s, ${number(rates.last(path, "out"))} out/s`),
        spark("messages per second", [["in", rates.series(path).in], ["out", rates.series(path).out]]),
        el("p", { class: "legend" }, el("span", { class: "in" }, "in"), el("span", { class: "out" }, "out")));
      if (busy || !live) return;
      busy = true;
      try { about.replaceChildren(...facts(await call("GET", `topics/${path}`))); }
      catch (error) { about.replaceChildren(el("p", { class: "problem" }, error.message)); }
      finally { busy = false; }
    },
  };
}

async function remove(path, name) {
  if (!confirm(`Delete topic ${name} and all its messages?`)) return;
  await attempt(async () => {
    await call("DELETE", `topics/${path}`);
    toast(`Topic ${name} deleted`);
    location.hash = "#/";
  });
}

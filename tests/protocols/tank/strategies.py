"""Any TANK request and answer, for hypothesis."""

from __future__ import annotations

from hypothesis import strategies as st

from multibroker import bundle
from multibroker.protocols.tank import messages as m
from multibroker.records import Bundle

u8, u16, u32, u64 = (st.integers(0, 2**bits - 1) for bits in (8, 16, 32, 64))
names = st.binary(max_size=255)
partition_ids = st.integers(0, 0xFFFE)


@st.composite
def bundles(draw: st.DrawFn) -> Bundle:
    payloads = draw(st.lists(st.binary(max_size=150), min_size=1, max_size=20))
    seqs = None
    if draw(st.booleans()):
        first = draw(st.integers(1, 2**63))
        seqs = [first + 2 * i for i in range(len(payloads))]
    made = bundle.encode(payloads, draw(u64), seqs=seqs, compress=draw(st.booleans()))
    return bundle.check(made.framed)[0]


@st.composite
def produces(draw: st.DrawFn) -> m.Produce:
    with_seqnum = draw(st.booleans())
    base = u64 if with_seqnum else st.just(0)
    places = st.builds(m.ProducePartition, u16, bundles(), base)
    topics = st.builds(m.ProduceTopic, names, st.lists(places, max_size=3))
    return m.Produce(
        draw(u32), draw(st.lists(topics, max_size=3)), draw(names), 2, draw(u8), draw(u32),
        with_seqnum,
    )


@st.composite
def consumes(draw: st.DrawFn) -> m.Consume:
    version = draw(st.sampled_from((0, 2, 3)))
    places = st.builds(m.FetchPartition, u16, u64, u32)
    topics = st.builds(m.FetchTopic, names, st.lists(places, max_size=4))
    return m.Consume(
        draw(u32), draw(st.lists(topics, min_size=1, max_size=4)), draw(u64), draw(u32),
        draw(names), version, draw(u8) if version >= 3 else 0,
    )


requests = st.one_of(
    produces(),
    consumes(),
    st.just(m.Ping()),
    st.builds(m.ReplicaId, u16),
    st.builds(m.DiscoverPartitions, u32, names, st.lists(u16, max_size=5)),
    st.builds(m.CreateTopic, u32, names, u16, st.binary(max_size=300)),
    st.builds(m.ReloadConf, u32, names, u16),
    st.builds(m.Status, u32),
    st.builds(m.DiscoverTopics, u32, u8),
    st.builds(m.DiscoverTopology, u32, u8),
)


@st.composite
def fetched(draw: st.DrawFn) -> m.FetchedPartition:
    index, data = draw(partition_ids), draw(st.binary(max_size=60))
    match draw(st.sampled_from(m.ConsumeFlag)):
        case m.ConsumeFlag.OK as flag:
            return m.FetchedPartition(index, flag, draw(u64), draw(u64), data)
        case m.ConsumeFlag.SPARSE as flag:
            return m.FetchedPartition(index, flag, 0, draw(u64), data)
        case m.ConsumeFlag.OUT_OF_RANGE as flag:
            return m.FetchedPartition(index, flag, 0, draw(u64), b"", draw(u64))
        case m.ConsumeFlag.OTHER_LEADER:  # of clusters only; we never say it
            return m.FetchedPartition(index, m.ConsumeFlag.SYSTEM_ERROR)
        case flag:
            return m.FetchedPartition(index, flag)


@st.composite
def fetched_topics(draw: st.DrawFn) -> m.FetchedTopic:
    if draw(st.booleans()):
        return m.FetchedTopic(draw(names), draw(st.integers(1, 255)), None)
    partitions = draw(st.lists(fetched(), max_size=4))
    return m.FetchedTopic(draw(names), len(partitions), partitions)


found = st.one_of(
    st.builds(m.PartitionFound, st.integers(0, 2**63), u64),
    st.just(m.PartitionFound(2**64 - 1, 2**64 - 1, m.DiscoverCode.SYSTEM_ERROR)),
)

responses = st.one_of(
    st.just(m.Ping()),
    st.builds(m.Produced, u32, st.binary(max_size=20)),
    st.builds(m.Consumed, u32, st.lists(fetched_topics(), max_size=4)),
    st.builds(m.PartitionsDiscovered, u32, names, st.lists(found, max_size=4)),
    st.builds(m.TopicCreated, u32, names, u8),
    st.builds(m.ConfReloaded, u32, names, u16, u8),
    st.builds(m.StatusReport, u32, u32, u32, u32, u32, u32, u32),
    st.builds(
        m.TopicsDiscovered,
        u32,
        st.lists(st.builds(m.TopicFound, names, u16, st.booleans()), max_size=4),
    ),
    st.builds(m.TopologyDiscovered, u32, u16),
)

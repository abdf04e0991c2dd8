"""BlipMQ: authenticated queues with quality of service. See docs/protocols/blipmq.md."""

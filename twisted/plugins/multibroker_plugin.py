from twisted.application.service import ServiceMaker

multibroker = ServiceMaker(
    "multibroker",
    "multibroker.tap",
    "One durable log that speaks five messaging protocols.",
    "multibroker",
)

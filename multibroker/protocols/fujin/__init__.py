"""Fujin: writers, readers and transactions, each on a QUIC stream of its own."""

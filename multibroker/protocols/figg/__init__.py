"""Figg: pub/sub over TCP where a reader resumes exactly where it left off."""

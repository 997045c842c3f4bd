"""The chaos test: a seeded story of records and faults, and the verdict on what the daemons made of it."""

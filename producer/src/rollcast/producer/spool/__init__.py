"""The spool: a folder in which each shard of a rollout waits, whole, until Kafka has it."""

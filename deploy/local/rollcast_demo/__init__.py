"""A tiny but real RL run on eight ranks whose training records go through Kafka and back."""

"""The shipper: the process that takes bundles from spools to Kafka."""

"""Fixtures that tests of every kind may use."""

pytest_plugins = ["fixtures.broker", "fixtures.installation", "fixtures.secured_broker"]

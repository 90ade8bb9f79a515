"""The conformance suite: what every backend must do, written once."""

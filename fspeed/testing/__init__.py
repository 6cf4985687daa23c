"""A harness for property-testing training code."""

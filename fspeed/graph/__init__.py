"""A step as one graph: traced, with what is free computed again, counters apart; and compiled."""

"""A step as one graph: traced, with what is free computed again, collectives early, counters apart; and compiled."""

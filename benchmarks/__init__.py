"""Claims as commands: each runs fspeed and its peers interleaved in one run and prints ratios."""

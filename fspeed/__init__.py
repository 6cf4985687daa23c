"""fspeed: training steps as pure functions, and transforms that compose in any order."""

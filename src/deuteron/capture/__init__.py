"""Capture: what AOTAutograd is told (decompositions) and how its joint graph is divided."""

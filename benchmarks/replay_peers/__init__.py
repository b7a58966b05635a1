"""Side by side with the peers: how long a batch takes to draw, a chunk to add, priorities to draw and update."""

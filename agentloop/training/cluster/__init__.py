"""A run on the nodes of a Ray cluster: placed by placement.py, run by ray_cluster.py."""

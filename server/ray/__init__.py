"""`umbel deploy`: replicas of the server on Ray Serve, which starts, scales, restarts and drains them."""

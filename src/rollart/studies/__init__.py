"""What simulation is for: one run, a swarm of random ones, the paper's tables, and the plan of a cluster."""

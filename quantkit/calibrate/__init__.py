"""From texts to what the solvers need: samples, one block run forward, statistics of its inputs."""

"""Jobs of a cluster: each on one node, or divided into shards among several."""

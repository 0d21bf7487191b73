"""Plans on a cluster of network namespaces: predicted beside observed."""

"""`guerdon bench`: measures a server under the load of a trainer; benchmarks/ use its load generator."""

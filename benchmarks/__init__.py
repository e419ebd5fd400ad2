"""What produced every number that the README quotes; see benchmarks/README.md."""

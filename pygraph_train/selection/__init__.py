"""Which plan a step runs with: timing, the comparison of plans, decisions kept between runs."""

"""Graph passes that take out of a region what would block its capture, or launch less; one pass a file."""

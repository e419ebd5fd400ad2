"""Graph passes that take out of a region what would block its capture; one pass a file."""

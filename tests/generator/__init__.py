"""Generates training runs, runs each plainly and with the library, and compares all that can be observed."""

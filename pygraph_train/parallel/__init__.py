"""The processes that train together: what stands against graphs there, and what they have to agree on."""

"""Parts of the library by themselves, and rules about the repository."""

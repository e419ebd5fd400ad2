"""What must stay true of the library, whatever it is inside: public names only, compared with plain training."""

"""Private torch APIs by subject: thin functions, no policy. (`torch_internals` holds the older ones.)"""

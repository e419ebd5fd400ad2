"""Every private torch API that the library uses, by subject: thin functions with the versions they were tried on."""

"""What a call depends on: the Dynamo trace of a step, its guards, and the signature of the call."""

"""The compile backend's regions: a forward or a backward of one Dynamo graph, its passes, its graph, its memory."""

"""Thin adapters, installed as `pygraph_train.integrations`. No engine logic lives here."""

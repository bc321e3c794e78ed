"""Requests on a language model: one after the other or several in a step, and the endpoint in front of them."""

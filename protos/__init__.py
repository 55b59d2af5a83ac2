"""Wire formats: generated modules of the .proto files in this folder."""

"""`fmaas`: the protocol of TGIS, and of vllm-tgis-adapter."""

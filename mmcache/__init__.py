"""mmcache: a shared cache of multimodal embeddings for disaggregated serving, on Mooncake Store."""

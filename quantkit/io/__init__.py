"""Files: atomic writes, staging folders, journals, hashes, and safetensors headers and shards."""

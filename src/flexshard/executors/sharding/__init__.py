"""The sharder and the sharded module: ids in, embeddings out."""

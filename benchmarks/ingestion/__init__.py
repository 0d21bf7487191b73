"""The reader and the ingestion service against what their users would write without them."""

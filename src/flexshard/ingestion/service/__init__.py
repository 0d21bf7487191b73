"""Ingestion as a service (DPP paper): jobs as people write them, splits and who reads them, workers, clients."""

"""A plan for people: tables, reasons, differences."""

"""The pool of pages: many adapters, a load by arrival, and an engine of just so many pages."""

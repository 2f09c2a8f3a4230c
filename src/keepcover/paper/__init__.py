"""The paper: its tables, figures and closed forms; the library does not depend on it."""

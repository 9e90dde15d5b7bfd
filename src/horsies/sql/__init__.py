"""The SQL of the product, one file per table family; read through horsies.db.query."""

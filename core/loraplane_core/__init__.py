"""What every Loraplane component shares: words, identity, wire types, errors. Imports no other component."""

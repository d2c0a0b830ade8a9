//! The engine as a dynamic plugin: libbaton_engine.so

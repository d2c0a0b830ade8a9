//! libplugin_BATON.so: Baton as a NIXL backend

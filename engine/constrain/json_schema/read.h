/* Keywords to sets of values, for the files that read them. */
#ifndef QUIRE_ENGINE_CONSTRAIN_JSON_SCHEMA_READ_H
#define QUIRE_ENGINE_CONSTRAIN_JSON_SCHEMA_READ_H

#include "engine/constrain/json_schema/schema.h"

/* The values that a schema of the document allows; NULL after an error. */
const struct shape *read_schema(struct schema *s, const struct value *v);
const struct shape *read_type(struct schema *s, const struct value *v);
const struct shape *read_enum(struct schema *s, const struct value *v);
const struct shape *read_const(struct schema *s, const struct value *v);
/* What the keywords allow that are about one type; those that combine schemas are left
 * out. A keyword that is not known and no annotation is an error. */
const struct shape *read_keywords(struct schema *s, const struct value *v);
/* The values of `base` that the dependencies of `v` allow. */
const struct shape *read_dependencies(struct schema *s, const struct value *v,
                                      const struct shape *base);
/* The objects that the keywords of `v` about objects allow; NULL: it has none of them,
 * or an error. */
const struct object_set *read_object(struct schema *s, const struct value *v);
/* A count, at least 0; -1 and the error recorded: it is none. */
int64_t read_count(struct schema *s, const char *keyword, const struct value *v);

#endif

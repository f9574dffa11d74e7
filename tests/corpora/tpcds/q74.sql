-- Customers whose web payments grow faster than those in stores.
with yearly as (
  select
    c_customer_id as id, c_first_name as first_name, c_last_name as last_name, d_year as year,
    's' as channel, sum(ss_net_paid) as total
  from customer
  join store_sales on ss_customer_sk = c_customer_sk
  join date_dim on d_date_sk = ss_sold_date_sk
  where d_year in (2001, 2001 + 1)
  group by c_customer_id, c_first_name, c_last_name, d_year
  union all
  select c_customer_id, c_first_name, c_last_name, d_year, 'w', sum(ws_net_paid)
  from customer
  join web_sales on ws_bill_customer_sk = c_customer_sk
  join date_dim on d_date_sk = ws_sold_date_sk
  where d_year in (2001, 2001 + 1)
  group by c_customer_id, c_first_name, c_last_name, d_year
)
select s2.id, s2.first_name, s2.last_name
from yearly as s1
join yearly as s2 on s2.id = s1.id
join yearly as w1 on w1.id = s1.id
join yearly as w2 on w2.id = s1.id
where s1.channel = 's' and s1.year = 2001 and s1.total > 0
  and s2.channel = 's' and s2.year = 2001 + 1
  and w1.channel = 'w' and w1.year = 2001 and w1.total > 0
  and w2.channel = 'w' and w2.year = 2001 + 1
  and case when w1.total > 0 then w2.total / w1.total end
    > case when s1.total > 0 then s2.total / s1.total end
order by s2.id, s2.first_name, s2.last_name
limit 100
